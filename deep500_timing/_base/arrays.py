"""Names of arrays, for annotations. Modules that compute import it; it costs what ``numpy.typing`` does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
