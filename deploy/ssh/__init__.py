"""`skerry deploy --target ssh`: edges and regions as systemd units of other machines."""
