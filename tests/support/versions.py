"""What doesn't hold on every torch of the supported range, and whose fault that is."""

import pytest
import torch


def before(version: str) -> bool:
    """Whether this torch is older than a release."""
    return bool(torch.__version__ < version)


def since(version: str, why: str) -> pytest.MarkDecorator:
    """A test that needs a torch this new; `why`: what goes wrong in older ones."""
    return pytest.mark.skipif(before(version), reason=f"before torch {version}: {why}")


def not_on(version: str, why: str) -> pytest.MarkDecorator:
    """A test that fails on one release, given as "2.12", for a fault of torch's."""
    here = torch.__version__.startswith(version)
    return pytest.mark.skipif(here, reason=f"torch {version}: {why}")
