"""Every forward kernel of the depth operators on odd shapes, to be run under compute-sanitizer.

compute-sanitizer --tool memcheck python benchmarks/depth_memcheck.py
"""

import torch

from tilewise.depth.triton import launch

EPS = 1e-6


def main() -> None:
    """Few tokens and many, neither a multiple of a tile."""
    for T, d in ((130, 7168), (1100, 2304)):
        v = torch.randn(3, T, d, device="cuda").bfloat16().unbind(0)
        Q, (u, p) = torch.randn(17, d, device="cuda") * 0.02, torch.randn(2, T, d, device="cuda").bfloat16().unbind(0)
        w = torch.ones(d, device="cuda", dtype=torch.bfloat16)
        s, _ = launch.scores(v, Q, EPS)
        launch.complete(u, p, Q, EPS)
        o1, lse = launch.combine(v, s)
        launch.combine(v, s[:1])
        launch.phase2_fwd(u, p, o1[0], lse[0], Q[0], w, EPS, EPS)
        launch.phase2_from_scores(u, p, v, s[0], Q[0], w, EPS, EPS)
        launch.mix_fwd(v, u, p, Q[0], w, EPS, EPS)
        torch.cuda.synchronize()
        print("done", T, d, flush=True)


if __name__ == "__main__":
    main()
