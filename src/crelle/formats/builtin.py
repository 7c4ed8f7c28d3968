"""Imports every format that comes with Crelle, which registers it: a new format adds its module here."""

from crelle.formats import affine, bcq, composite, dense, exl3, fp4, grouped, mixed, rotated, trellis, two_level

MODULES = (affine, bcq, composite, dense, exl3, fp4, grouped, mixed, rotated, trellis, two_level)
