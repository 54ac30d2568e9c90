"""What amptune did, recorded once, and the program that holds the tree against it: `python -m frozen --help`.

FROZEN_ADAPTER in the environment names the adapter of another checkout, whose amptune is then first on the path.
"""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location

if _path := os.environ.get("FROZEN_ADAPTER"):
    _spec = spec_from_file_location("frozen.adapter", _path)
    if _spec is None or _spec.loader is None:
        raise ImportError(f"FROZEN_ADAPTER is no Python file: {_path}")
    adapter = sys.modules["frozen.adapter"] = module_from_spec(_spec)
    _spec.loader.exec_module(adapter)
