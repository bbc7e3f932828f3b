"""Selection of the GPU engine, its reasons when it is unsupported, and code generation; without Triton or a
GPU."""

import builtins
import symtable
import sys
from types import SimpleNamespace

import pytest
import torch

import unsoft
from unsoft.engines import POINTWISE, pointwise, registry
from unsoft.engines.arguments import checked_call
from unsoft.engines.triton import availability, binding, launch
from unsoft.engines.triton.codegen import formula_source, render, unprintable
from unsoft.engines.triton.launch import KERNELS, SMALLEST, TileSizes, candidates, precision
from unsoft.engines.triton.structures import ListFixed
from unsoft.errors import CompilerWarning
from unsoft.formula import Formula
from unsoft.formula.operation import COMPARISONS, OPERATIONS, Operation, add, remove
from unsoft.mechanisms import resolve

X = torch.linspace(-1, 1, 48).view(1, 2, 6, 4)


@pytest.fixture
def on_gpu(monkeypatch):
    """Treat tensors of the CPU as if they were on a working GPU."""
    monkeypatch.setattr(availability, "missing", lambda device, index: None)


def call(mechanism="cog", width=4, dtype=torch.float32):
    x = torch.zeros(1, 2, 6, width, dtype=dtype)
    return checked_call(x, x, x, resolve(mechanism) if isinstance(mechanism, str) else mechanism)[0]


def test_tensors_of_the_cpu_are_refused_with_the_engine_that_works(monkeypatch):
    monkeypatch.setattr(availability, "installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError, match="'triton' does not support .* the tensors are on the CPU; use 'native'"
    ):
        unsoft.attention(X, X, X, "cog", engine="triton")


def test_without_triton_the_reason_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(availability, "installed", lambda: False)
    with pytest.raises(
        ValueError, match=r"Triton is not installed \(pip install 'unsoft\[gpu\]'\); use 'native'"
    ):
        unsoft.attention(X, X, X, "cog", engine="triton")


def test_another_accelerator(monkeypatch):
    monkeypatch.setattr(availability, "installed", lambda: True)
    assert "use 'tiled'" in availability.missing("mps", None)


def test_an_old_gpu(monkeypatch):
    monkeypatch.setattr(availability, "installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    assert availability.missing("cuda", 0) == (
        "it needs compute capability 8.0, and Tesla T4 has 7.5; use 'tiled'"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    assert availability.missing("cuda", 0) is None


def test_wide_heads(on_gpu):
    assert availability.unsupported(call(width=256)) is None
    assert availability.unsupported(call(width=257)) == "heads are wider than 256; use 'tiled'"


def test_many_heads(on_gpu):
    """Only the first dimension of a grid may have more than 65535 programs."""
    x = torch.zeros(1, 1, 1, 4).expand(32768, 2, 1, 4)
    many = checked_call(x, x, x, resolve("cog"))[0]
    assert availability.unsupported(many) is None
    assert availability.unfit(many) == "batch times heads is more than 65535; use 'tiled'"


def test_auto_prefers_it_on_a_gpu_and_nowhere_else(on_gpu, monkeypatch):
    engine = POINTWISE.named("triton")
    assert engine.unsupported_reason(call()) is None and not engine.prefer(call())
    assert POINTWISE.engines[0] is engine
    assert POINTWISE.choose("auto", call()).name != "triton"


def test_triton_that_does_not_work_is_an_error_by_name(on_gpu, monkeypatch):
    monkeypatch.setattr(availability, "failure", availability.failure.__wrapped__)

    def broken(device):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(availability, "probe", broken)
    with pytest.raises(ValueError, match="'triton' is not available here: .*Failed to find C compiler"):
        unsoft.attention(X, X, X, "cog", engine="triton")


def test_every_operation_has_triton_code():
    assert not [name for name, operation in OPERATIONS.items() if operation.triton is None]


def as_torch(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64)


TRITON_IN_TORCH = {
    "tl": SimpleNamespace(
        **{name: getattr(torch, name) for name in ("abs", "where", "exp", "log", "sin", "cos", "erf")},
        maximum=lambda a, b: torch.maximum(a, as_torch(b)),
        minimum=lambda a, b: torch.minimum(a, as_torch(b)),
    ),
    **{name: getattr(torch, name) for name in ("sign", "expm1", "sinh", "cosh", "log1p", "tanh", "sigmoid")},
    "power": torch.pow,
    "root": torch.sqrt,
    "softplus": torch.nn.functional.softplus,
    "expdiff": lambda a, b, m: (a - m).exp() - (b - m).exp(),
}
"""The functions in Triton's templates, in torch; the functions themselves need Triton to run."""


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "where"])
def test_triton_code_computes_the_operation(name):
    operation = OPERATIONS[name]
    a, b, m = torch.tensor([[0.3, 1.7, 0.6], [0.9, 0.2, 0.6], [1.0, 2.0, 3.0]], dtype=torch.float64)
    code = operation.triton.format("a", "b", "m")
    actual = eval(code, TRITON_IN_TORCH | {"a": a, "b": b, "m": m})
    expected = operation.torch(*(a, b, m)[: operation.arity])
    if name in COMPARISONS:
        expected = expected[0]  # the condition, and the dtype of the numbers
    torch.testing.assert_close(actual, expected)


def test_an_operation_without_triton_code_is_declined():
    add(
        Operation(
            name="cube",
            arity=1,
            fold=lambda x: x**3,
            torch=lambda x: x**3,
            slope=lambda node, a, da: 3 * a**2 * da,
        )
    )
    try:
        formula = Formula("cube(s)/n")
        assert unprintable(formula.key) == "it has no code for the operation cube"
    finally:
        remove("cube")
    assert unprintable(Formula("s**3/n").key) is None


@pytest.mark.parametrize("name", unsoft.mechanisms())
def test_every_formula_is_printed_as_valid_python(name):
    formula = resolve(name)
    if isinstance(formula, Formula):
        for biased in (False, True):
            compile(formula_source(formula, biased), name, "exec")


@pytest.mark.parametrize("biased", [False, True])
def test_a_rendered_module_defines_every_name_it_uses(biased):
    text = render(resolve("softpick"), biased)
    module = symtable.symtable(text, "rendered", "exec")
    defined = set(module.get_identifiers()) | set(dir(builtins))
    functions = [table for table in module.get_children() if table.get_type() == "function"]
    used = {name for table in functions for name in table.get_globals()}
    assert {"forward_kernel", "key_gradients_kernel", "value", "HAS_MASS"} <= defined and used
    assert not used - defined


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "gfx942", "sm_999"])
def test_tile_sizes_end_with_the_smallest(architecture, width, bits):
    for kernel in KERNELS:
        tried = candidates(kernel, architecture, width, bits)
        assert tried[-1] == SMALLEST and len(set(tried)) == len(tried)
        for sizes in tried:
            assert all(size & (size - 1) == 0 and size >= 16 for size in sizes[:2])


class OutOfResources(Exception):
    """Replaces Triton's exception."""


@pytest.fixture
def one_launch(monkeypatch):
    """Return a function that makes a launch of a fake kernel with tile sizes to try."""
    monkeypatch.setitem(sys.modules, "triton.runtime.errors", SimpleNamespace(OutOfResources=OutOfResources))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "_chosen", {})
    monkeypatch.setattr(launch, "_refused", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def make(kernel, *sizes):
        fixed = ListFixed(of_keys=False, causal=False)
        monkeypatch.setattr(launch.Launch, "fixed", property(lambda self: "fixed"))
        return launch.Launch(
            "decode", kernel, {"FIXED": fixed}, lambda sizes: (1, 1), "", torch.bfloat16, sizes
        )

    return make


def test_sizes_that_no_longer_fit_are_chosen_again(one_launch):
    """Triton compiles again for strides of another kind, and may then need more shared memory."""
    ran, room = [], [64]

    def run(FIXED, **options):
        if room[0] < FIXED.M:
            raise OutOfResources
        ran.append(FIXED.M)

    class Kernel:
        def warmup(self, grid, **options):
            return SimpleNamespace(_init_handles=lambda: run(**options))

        def __getitem__(self, grid):
            return run

    made = one_launch(Kernel(), TileSizes(64, 64, 4, 2), SMALLEST)
    for room[0] in (64, 32, 64):
        ran.clear()
        launch.start(made)
    assert ran == [SMALLEST.rows]
    room[0] = 0
    with pytest.raises(launch.KernelError, match="too little shared memory"):
        launch.start(made)


def test_what_cannot_be_compiled_is_tried_once(one_launch):
    tried = []

    def warmup(**options):
        tried.append(options)
        raise RuntimeError("no such instruction")

    made = one_launch(SimpleNamespace(warmup=warmup), SMALLEST)
    for _ in range(2):
        with pytest.raises(launch.KernelError, match="RuntimeError: no such instruction"):
            launch.sizes_for(made)
    assert len(tried) == 1


def test_a_kernel_that_fails_at_launch_is_named_with_the_error(one_launch):
    class Kernel:
        def warmup(self, **options):
            return SimpleNamespace(_init_handles=lambda: None)

        def __getitem__(self, grid):
            def run(**options):
                raise RuntimeError("Triton Error [CUDA]: device lost")

            return run

    with pytest.raises(launch.KernelError, match="kernel decode: .*device lost"):
        launch.start(one_launch(Kernel(), SMALLEST))


@pytest.fixture
def failing_kernels(on_gpu, monkeypatch):
    """Select the GPU engine, and let every kernel of formulas fail at its launch."""

    def fail(*arguments):
        raise launch.KernelError("kernel forward: RuntimeError: device lost")

    monkeypatch.setattr(availability, "failure", lambda device, index: None)
    monkeypatch.setattr(pointwise, "on_gpu", lambda x: True)
    monkeypatch.setattr(binding, "CallArguments", fail)
    monkeypatch.setattr(registry, "_warned", set())


def test_auto_warns_once_about_a_failing_kernel_and_another_engine_computes(failing_kernels, recwarn):
    def output_and_gradient(engine):
        q = X.clone().requires_grad_()
        out = unsoft.attention(q, X, X, "cog", engine=engine)
        return out.detach(), *torch.autograd.grad(out.square().sum(), q)

    expected = output_and_gradient("dense")
    for _ in range(2):
        torch.testing.assert_close(output_and_gradient("auto"), expected)
    (warning,) = recwarn
    assert warning.category is CompilerWarning
    assert "kernel forward: RuntimeError: device lost" in str(warning.message)


def test_a_failing_kernel_is_an_error_by_name(failing_kernels):
    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(launch.KernelError, match="kernel forward: RuntimeError: device lost"):
            unsoft.attention(x, X, X, "cog", engine="triton")


def test_costly_formulas_may_have_smaller_tiles(monkeypatch):
    costly = {name for name in unsoft.mechanisms() if isinstance(resolve(name), Formula)}
    costly = {name for name in costly if launch.is_costly(resolve(name).key)}
    assert {"softpick", "sinh", "tanh"} <= costly and not costly & {"cog", "softmax", "relu2", "sigmoid"}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90")
    own = {"query_gradients": {"128": [64, 64, 4, 2]}, "query_gradients, costly": {"128": [64, 32, 4, 2]}}
    monkeypatch.setattr(launch, "_table", lambda: {"sm_90": own})
    fixed = SimpleNamespace(exact=False, padded=128, value_padded=128)
    first = {
        name: launch._possible(
            launch.Launch("query_gradients", None, {"FIXED": fixed}, None, resolve(name).key, torch.bfloat16)
        )[0]
        for name in ("cog", "softpick")
    }
    assert first == {"cog": (64, 64, 4, 2), "softpick": (64, 32, 4, 2)}


@pytest.mark.parametrize(
    ("architecture", "relative"),
    [("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_103", "sm_100"), ("sm_121", "sm_120")]
    + [("gfx90a", "gfx942"), ("gfx950", "gfx950"), ("gfx1100", "other"), ("sm_200", "other")],
)
def test_a_gpu_that_is_not_in_the_table_has_the_sizes_of_a_relative(architecture, relative):
    assert launch._relative(architecture) == relative


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_tf32_only_where_it_is_allowed_by_either_switch():
    assert precision(torch.float32) == "tf32x3" and precision(torch.bfloat16) == "ieee"
    try:
        torch.set_float32_matmul_precision("high")
        assert precision(torch.float32) == "tf32"
        torch.set_float32_matmul_precision("highest")
        assert precision(torch.float32) == "tf32x3"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert precision(torch.float32) == "tf32"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert precision(torch.float32) == "tf32x3"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
