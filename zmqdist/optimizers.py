"""Optimizers and schedules of learning rates, with Keras's formulas, arguments and defaults.

    rate = zd.optimizers.schedules.ExponentialDecay(0.1, decay_steps=1000, decay_rate=0.9)
    optimizer = zd.optimizers.SGD(rate, momentum=0.9)
    optimizer.apply_gradients(zip(gradients, variables))

docs/parameter_server.md says how to use this module, update_rules.py has the formulas.
"""

from zmqdist import schedules
from zmqdist.training.optimizers import SGD, Adagrad, Adam, Momentum, Optimizer, RMSprop

__all__ = ["SGD", "Adagrad", "Adam", "Momentum", "Optimizer", "RMSprop", "schedules"]
__dir__ = __all__.copy  # dir() and completion show no other names
