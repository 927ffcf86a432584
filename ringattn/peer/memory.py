from .pulls import Link
