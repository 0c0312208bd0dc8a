"""Run training steps of single ranks without devices and peers, and prove that the ranks' operations fit together."""
