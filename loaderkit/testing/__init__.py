"""The contract suites that loaderkit runs on its own connectors, sources and stages, for connectors, sources and stages
of other packages.

    class TestZip(loaderkit.testing.ConnectorContract):
        @pytest.fixture
        def make_store(self, tmp_path): ...

Each suite is a class of pytest tests. A subclass in a test module gives the fixtures that its docstring names, and pytest finds
the tests. Only this module needs pytest.
"""

from loaderkit.testing.connectors import ConnectorContract, Store
from loaderkit.testing.sources import SourceContract
from loaderkit.testing.stages import StageContract

__all__ = ["ConnectorContract", "SourceContract", "StageContract", "Store"]
