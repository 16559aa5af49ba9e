"""Ways to store feature maps, one file or folder each; importing the package fills the registry (base.py)."""

from krnet.recorders.compact import recorder as _krnet  # noqa: F401, I001  in the order of the tables
from krnet.recorders.paper import recorder as _paper  # noqa: F401
from krnet.recorders.autoencoder import recorder as _autoencoder  # noqa: F401
from krnet.recorders import pca, transform, quantized  # noqa: F401
from krnet.recorders.pq import recorder as _pq  # noqa: F401
from krnet.recorders.images import recorder as _images  # noqa: F401
from krnet.recorders import residual, local_search, rotation, zfp, fp8  # noqa: F401
from krnet.recorders import raw, zstd  # noqa: F401
