"""What mechanisms and models cost: time, memory, multiply-accumulates and parameters; and checks of their kernels."""
