"""Batches of whole rows and this rank's shards of them: the public names of :mod:`ringattn.training.batch`."""

from .training.batch import BOUNDARIES as BOUNDARIES
from .training.batch import IGNORE as IGNORE
from .training.batch import begins as begins
from .training.batch import counted_positions as counted_positions
from .training.batch import default_positions as default_positions
from .training.batch import documents as documents
from .training.batch import shard_batch as shard_batch
from .training.batch import shift_labels as shift_labels
