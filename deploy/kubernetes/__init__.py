"""A topology as Kubernetes objects: `skerry deploy UNIT --target kubernetes`."""
