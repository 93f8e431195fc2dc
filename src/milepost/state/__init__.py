"""What a sequence remembers: layout, arena, blocks, slots, checkpoints, prefix tree, placement, retention, fingerprint, audit.

Only `pools` touches arrays; everything else here is integers, so that a simulator can run the same code.
"""
