"""Train Mixture-of-Experts models under limited expert capacity: admission, the MoE layer, a small language model, data, loop and export.

Everything here needs the ``train`` extra (PyTorch); nothing here knows the engine. The entry points are ``admission.admit``,
``moe.MoELayer``, ``patch.patch``, ``lm.NanoMoE`` and ``loop.fit``.
"""
