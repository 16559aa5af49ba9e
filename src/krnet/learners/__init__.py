"""Methods that learn task after task, one file or folder each. Importing this package fills the registry (base.py)."""

from krnet.learners import acil, dsal, ewc, fecam, fetril, finetune, icarl, joint, lucir, mas, ncm, pass_  # noqa: F401
from krnet.learners.gfr import learner as _gfr  # noqa: F401
from krnet.learners.kril import learner as _kril  # noqa: F401
