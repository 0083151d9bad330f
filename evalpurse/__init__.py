"""evalpurse: a metric, experiments to run, and a purse that no agent can overspend."""

__version__ = "0.1.0"
