"""From a model to its FP8 form and back: `policy` chooses layers, `break_even` knows which are slower in FP8, `layers` changes
them, `entry` takes the optimizer along."""

from octavo.convert.break_even import BreakEven
from octavo.convert.entry import initialize
from octavo.convert.layers import convert, convert_report, export
from octavo.convert.policy import LayerReport

__all__ = ["BreakEven", "LayerReport", "convert", "convert_report", "export", "initialize"]
