from .pulls import GradientBuffers, Push
