"""Megatron-Core's checkpoints: ``torch_dist`` directories and legacy trees of ``.pt`` files.

* ``form`` recognises them and leads to the rest; ``iterations`` chooses directories; ``keys`` has names of files and
  tensors, ``stages`` the layers of a pipeline's ranks, ``arguments`` those of a run.
* ``placing`` has one table for all directions: of which tensors a parameter of a rank is made, cut how, in which order.
* Reading ``torch_dist``: ``torch_dist``, with ``blocks`` for flattened state. ``bucket_state`` names the state in
  buckets: ``parameters`` lists what ranks hold, ``buckets`` where it lies, ``proofs`` compares masters with weights.
* Reading legacy trees: ``legacy``, of ``rank_files``; ``live`` inverts `placing`, ``legacy_state`` finds the owners of
  state, ``gathered`` joins the parts. ``common`` reads the common state of both.
* Writing: ``written`` and ``legacy_written``; ``model`` checks the tensors, ``origin`` and ``training`` make the rest.
"""
