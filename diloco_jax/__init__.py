"""diloco_jax: training one model on many islands of accelerators in JAX."""

__version__ = '0.1.0'
