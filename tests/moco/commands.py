"""The commands of moco/ with the reader of weights that benchmarks/__main__.py hands them."""

import functools

import moco.finetune
import moco.knn
import moco.linear
import moco.pretrain
from convert.initial_weights import read_initial_weights

pretrain, linear, finetune, knn = (
    functools.partial(module.main, read=read_initial_weights)
    for module in (moco.pretrain, moco.linear, moco.finetune, moco.knn)
)
