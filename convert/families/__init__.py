"""Backbone families, one file each: shapes, names of the tensors, the network."""
