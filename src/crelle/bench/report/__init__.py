"""One page of what was measured: result files → typed rows (readers/) → figures → HTML with inline SVG, or PNGs."""
