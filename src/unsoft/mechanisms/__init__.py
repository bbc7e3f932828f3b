"""The built-in mechanisms, one small file each, and the register that finds them.

>>> list(mechanisms())[:3]
['cog', 'cosformer', 'decay']
>>> formulas()["cog"].weight
Expr('sign(s)*exp(abs(s) - m)')
"""

from unsoft.modules.catalogue import formulas, mechanisms
from unsoft.modules.plugins import register, unregister
from unsoft.modules.registry import resolve

__all__ = ["formulas", "mechanisms", "register", "resolve", "unregister"]
