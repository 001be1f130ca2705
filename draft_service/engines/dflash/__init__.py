"""The block drafter: DFlash, one forward for all the next positions."""
