"""The ways to run a server, one module each, behind one interface: `device.Device`."""
