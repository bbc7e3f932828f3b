"""Names that a parameter cannot have, because the formula or the code printed from it uses them."""

import keyword

from unsoft.formula.expr import FUNCTIONS

SYMBOLS = frozenset("smnijz")
PARTS = frozenset({"weight", "mass", "peak", "norm", "offset_mass"})
_CODE = frozenset({"logits", "total", "torch", "real", "Math", "NaN", "Infinity", "undefined", "arguments"})
_CPP_AND_JAVASCRIPT = frozenset({
    "abstract", "alignas", "alignof", "asm", "auto", "bool", "boolean", "byte", "case", "catch", "char",
    "concept", "const", "constexpr", "constinit", "default", "delete", "debugger", "do", "double",
    "dynamic_cast", "enum", "eval", "explicit", "export", "extends", "extern", "final", "finally", "float",
    "friend", "function", "goto", "implements", "inline", "instanceof", "int", "interface", "let", "long",
    "mutable", "namespace", "native", "new", "noexcept", "null", "nullptr", "operator", "package", "private",
    "protected", "public", "register", "reinterpret_cast", "requires", "short", "signed", "sizeof", "static",
    "static_assert", "static_cast", "struct", "super", "switch", "synchronized", "template", "this",
    "thread_local", "throw", "throws", "transient", "true", "false", "typedef", "typeid", "typename",
    "typeof", "union", "unsigned", "using", "var", "virtual", "void", "volatile", "wchar_t",
})  # fmt: skip
RESERVED = SYMBOLS | PARTS | _CODE | _CPP_AND_JAVASCRIPT | frozenset(keyword.kwlist) | FUNCTIONS.keys()
