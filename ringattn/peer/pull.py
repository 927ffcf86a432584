from .pulls import FetchBuffers, Pull
