"""Ways to store feature maps, one file or folder each; importing the package fills the registry (base.py)."""

from krnet.recorders import pca, quantized, raw, transform  # noqa: F401
from krnet.recorders.autoencoder import recorder as _autoencoder  # noqa: F401
from krnet.recorders.images import recorder as _images  # noqa: F401
from krnet.recorders.paper import recorder as _paper  # noqa: F401
from krnet.recorders.pq import recorder as _pq  # noqa: F401
