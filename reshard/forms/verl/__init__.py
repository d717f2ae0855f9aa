"""Rank files that verl and SkyRL write with ``torch.save``: the model's state dictionary of each rank of FSDP.

A file is one archive, whose pickle lists the rank's tensors. A DTensor in it has the shape of the full tensor, and the
place of the rank in a mesh with a placement for each of its dimensions: these give the box of the rank's part.
"""
