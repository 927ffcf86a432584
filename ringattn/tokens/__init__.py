"""Functions of whole rows over shards: halo exchange, and exchange of heads."""
