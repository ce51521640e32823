"""What Detectron2 asks a backbone for, from what those of the embedded engine have."""

from collections.abc import Mapping

from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone


class WithShapes(Backbone):
    """To be inherited beside a network with `strides` and `stage_channels` by the maps' names."""

    strides: Mapping[str, int]
    stage_channels: Mapping[str, int]

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {
            name: ShapeSpec(channels=self.stage_channels[name], stride=stride)
            for name, stride in self.strides.items()
        }
