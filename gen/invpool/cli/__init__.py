"""The command line: ``invpool generate | check | show | explain | clean``."""
