"""Drop-ins for models of other libraries. Importing this package imports none of them."""

from .patching import PatchError, patch, unpatch
from .report import Patched, Report

__all__ = ["PatchError", "Patched", "Report", "patch", "unpatch"]
