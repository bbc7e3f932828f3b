"""The JavaScript that draws charts, as vl-convert brings it. Bundling takes seconds, so the result is kept."""

from __future__ import annotations

import importlib.metadata

from unsoft.compare.store import Store, key_of


def vega(store: Store) -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    key = key_of({"name": "vega", "version": importlib.metadata.version("vl-convert-python")})
    found = store.get(key)
    if found is not None and isinstance(found.get("script"), str):
        return found["script"]
    import vl_convert

    script = vl_convert.javascript_bundle()
    store.put(key, {"script": script})
    return script
