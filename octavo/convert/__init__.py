"""From a model to its FP8 form and back: `policy` chooses layers, `layers` changes them, `entry` takes the optimizer along."""

from octavo.convert.entry import initialize
from octavo.convert.layers import convert, convert_report, export
from octavo.convert.policy import LayerReport

__all__ = ["LayerReport", "convert", "convert_report", "export", "initialize"]
