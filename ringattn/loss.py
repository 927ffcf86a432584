"""Losses over all ranks' targets: the public names of :mod:`ringattn.training.loss` and
:mod:`ringattn.training.trees`."""

from .training.loss import count_targets as count_targets
from .training.loss import cross_entropy as cross_entropy
from .training.loss import linear_cross_entropy as linear_cross_entropy
from .training.loss import log_probs as log_probs
from .training.loss import reduced as reduced
from .training.loss import row_sums as row_sums
from .training.trees import AnswerLogProbs as AnswerLogProbs
from .training.trees import tree_log_probs as tree_log_probs
