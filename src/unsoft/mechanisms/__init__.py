"""The built-in mechanisms, one small file each, and the register that finds them.

>>> list(mechanisms())[:3]
['cog', 'cosformer', 'decay']
>>> formulas()["cog"].weight
Expr('sign(s)*exp(abs(s) - m)')
"""

from unsoft.mechanisms.core.catalogue import formulas, mechanisms
from unsoft.mechanisms.core.plugins import register, unregister
from unsoft.mechanisms.core.registry import resolve

__all__ = ["formulas", "mechanisms", "register", "resolve", "unregister"]
