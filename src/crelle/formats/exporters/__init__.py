"""Our tensors in the files of other projects."""
