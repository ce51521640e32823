"""Backbones that both engines have, one file per family; importing them here registers them."""

from detection.modeling.backbones import pyramids as pyramids
from detection.modeling.backbones import resnet as resnet
from detection.modeling.backbones import vit as vit
from detection.modeling.backbones.base import backbone_type as backbone_type
from detection.modeling.backbones.base import check_backbone as check_backbone
from detection.modeling.backbones.base import frozen_random as frozen_random
from detection.modeling.backbones.base import is_frozen as is_frozen
