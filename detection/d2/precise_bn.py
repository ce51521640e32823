"""PreciseBN that ends with the same statistics on every rank.

Deviation: Detectron2's hook re-estimates the statistics of each rank from that rank's own images,
weighted by their number of pixels, and never compares them (facebookresearch/detectron2#5398): the
ranks then evaluate different networks. Here the ranks' estimates are combined into those of all
images together.

Deviation: the images are the first of the training's order each time, and what their augmentation
samples does not advance the training's streams, as on the embedded engine. Detectron2 continues
with the images after those of the time before, which a resumed run would not know.
"""

from detectron2.engine import HookBase
from detectron2.engine.hooks import PreciseBN
from torch import nn

from detection.d2.state import EndedError
from detection.data.random_state import private_random
from detection.engine.precise_bn import combine_statistics, count_values
from detection.engine.resuming import due
from moco.common.errors import DataError


class RankEqualPreciseBN(HookBase):
    """Detectron2's hook, followed by the combination over ranks.

    Args:
        inner: Detectron2's hook, which runs the model over its data.
        model: the model that `inner` updates.
        period_iters: between two runs; 0: at the end only.
    """

    def __init__(self, inner: PreciseBN, model: nn.Module, period_iters: int) -> None:
        self.inner, self.model, self.period_iters = inner, model, period_iters

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if due(done, self.period_iters) or done == self.trainer.max_iter:
            self.inner._data_iter = None
            try:
                with count_values(self.model) as counts, private_random():
                    self.inner.update_stats()
            except DataError as error:  # half of the statistics are no state to be saved
                raise EndedError(error) from error
            combine_statistics(counts)
