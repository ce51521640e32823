"""Backbone families, one file each; importing them here registers them."""

from convert.families import convnext as convnext
from convert.families import resnet as resnet
from convert.families import timm_model as timm_model
from convert.families import vit as vit
