"""The commands of `fourfold`: one dataclass of arguments and one function each. No torch until one runs."""
