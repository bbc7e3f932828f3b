"""``unsoft doctor``: check the installation, and the numbers of the GPU engine on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unsoft.cli.arguments import AsJson, ToFile, check_file, write_result
from unsoft.cli.terminal import INTERRUPTED, note, progress, show_table

if TYPE_CHECKING:
    from unsoft.testing.device import Finding


def command(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Run the checks of the GPU engine on this machine's GPU.")
    ] = False,
    to: ToFile = None,
    as_json: AsJson = False,
) -> None:
    """Show versions, engines, and what is missing.

    With --gpu also: forward and every gradient of the engine 'triton' against the dense one in float64, some
    seventy kinds of call, a few minutes. Attach the file of --to to an issue.

    \b
    Examples:
      unsoft doctor
      unsoft doctor --gpu --to gpu.json
    """
    check_file(to, "'--to'")
    from unsoft.cli.installation import facts

    known = facts()
    record: dict[str, Any] = {"schema": 1, "facts": [asdict(fact) for fact in known]}
    if not as_json:
        rows = [(fact.what, fact.found, fact.advice) for fact in known]
        show_table({"what": "left", "found": "left", "to get it": "left"}, rows)
    code = _check_gpu(record, show=not as_json) if gpu else 0
    write_result(record, to, as_json=as_json)
    if code:
        raise typer.Exit(code)


def _check_gpu(record: dict[str, Any], show: bool) -> int:
    """Add the findings to the record and return the exit code."""
    from unsoft.cli.installation import gpu_problem
    from unsoft.engines.triton.launch import interpreted
    from unsoft.testing.device import KINDS, check_device, verdict

    device = "cpu" if interpreted() else "cuda"
    if reason := gpu_problem(device):
        message = f"nothing was checked: the engine 'triton' cannot run here: {reason}"
        record["gpu"] = {"verdict": message, "finished": False, "checks": []}
        note(message)
        return 1
    findings: list[Finding] = []
    interrupted = False
    try:
        with progress(len(KINDS)) as announce:
            for number, kind in enumerate(KINDS):
                announce(number, kind.name, kind.name)
                findings += check_device(device, "triton", (kind,))
    except KeyboardInterrupt:
        interrupted = True
    if show:
        columns = {"check": "left", "largest error": "right", "limit": "right", "verdict": "left"}
        show_table(columns, [_row(finding) for finding in findings])
    summary = verdict(findings)
    checks = [asdict(finding) for finding in findings]
    record["gpu"] = {"verdict": summary, "finished": not interrupted, "checks": checks}
    note(summary)
    if interrupted:
        return INTERRUPTED
    return 0 if all(finding.passed for finding in findings) else 1


def _row(finding: Finding) -> tuple[str, str, str, str]:
    error = f"{max(finding.errors.values()):.1e}" if finding.errors else ""
    outcome = "ok" if finding.passed else f"FAILED {finding.problem}".strip()
    return finding.name, error, f"{finding.limit:.0e}", outcome
