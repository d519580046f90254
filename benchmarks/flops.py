"""Floating-point operations and bytes, counted by hand.

A multiplication and an addition count as two operations. Only convolutions and dense layers are counted; pooling,
biases and the loss are below 2 %. For each layer, the backward pass costs as much as the forward pass for the kernel's
gradient and as much again for the input's gradient, which the first layer does not need.
"""

from __future__ import annotations

# Operations of one example's forward pass: 2 x outputs x kernel.
CONV1 = 2 * (24 * 24 * 6) * (5 * 5 * 1)
CONV2 = 2 * (8 * 8 * 16) * (5 * 5 * 6)
DENSE = 2 * (256 * 120 + 120 * 84 + 84 * 10)

# The package's convolution computes the four outputs of a pooling window from one patch of 6 x 6, so it executes this
# many times the counted operations (see `jaxpfl.models.convolution.conv_pool`).
EXECUTED = (6 * 6) / (5 * 5)


def forward(batch: int) -> int:
    """Operations of one forward pass of the papers' MNIST CNN, F."""
    return batch * (CONV1 + CONV2 + DENSE)


def backward(batch: int) -> int:
    """Operations of the CNN's backward pass, B: each layer's dW and dX, without dX of conv1."""
    return batch * (CONV1 + 2 * (CONV2 + DENSE))


def cnn_step(method: str, batch: int = 20) -> int:
    """Operations of a client's step: F + B for FedAvg (30.3 MFLOP at batch 20), 4 F + 2 B for AdaPeD (2.74 times).

    In AdaPeD, theta and mu each have a forward and a backward pass, and then a forward pass at their new values.
    """
    passes = {"fedavg": (1, 1), "adaped": (4, 2)}[method]
    return passes[0] * forward(batch) + passes[1] * backward(batch)


def cnn_step_executed(method: str, batch: int = 20) -> float:
    """Operations of a client's step that the package's convolutions execute."""
    f, b = {"fedavg": (1, 1), "adaped": (4, 2)}[method]
    convolutions = f * (CONV1 + CONV2) + b * (CONV1 + 2 * CONV2)
    return cnn_step(method, batch) + (EXECUTED - 1) * batch * convolutions


def linear_bytes(clients: int, steps: int, examples: int, features: int, outputs: int) -> dict[str, float]:
    """Bytes of one full-participation FedAvg round of linear clients with full batches, in float32.

    Returns:
      ``memory``: bytes if each client's examples are read from memory once and reread from a cache in later steps.
      ``steps``: bytes if each step reads the examples, and reads and writes the model.
    """
    data = 4 * examples * (features + 2)  # inputs, labels, and masks, which XLA may store as words
    model = 4 * outputs * (features + 1)
    return {"memory": float(clients * data), "steps": float(clients * steps * (data + 2 * model))}
