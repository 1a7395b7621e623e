"""The coroutine tests of the edge's folder hold here as well."""

from tests.edge.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
