import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("report_run_folder", Path(__file__).with_name("run_folder.py"))
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


@pytest.fixture
def write_run():
    """Writer of synthetic run folders: (folder, **options) -> folder."""
    return _module.write_run
