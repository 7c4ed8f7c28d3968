"""Imports every format that comes with Crelle, which registers it: a new format adds its module here."""

from crelle.formats import affine, bcq, dense, exl3, fp4, grouped, mixed, trellis, two_level
from crelle.formats.wrappers import composite, rotated

MODULES = (affine, bcq, composite, dense, exl3, fp4, grouped, mixed, rotated, trellis, two_level)
