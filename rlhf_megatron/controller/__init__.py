"""The control plane: worker groups, dispatch of rows, pools of ranks, and the transports that carry calls."""
