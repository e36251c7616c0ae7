"""What a step's kernels are expected to take."""

from tools.gpu import kernel_costs


def test_the_kernels_of_a_record_are_added_up():
    lines = [
        ["gemm", "cublasLtMatmul", "TN", "8192", "8192", "8192", "1", "14", "14"],
        ["attention", "cudnn", "forward", "12", "8", "4096", "64", "4096", "1"],
        ["bytes", "triton_poi_fused_copy_0", "2000000000"],
        ["triton", "triton_poi_fused_copy_0", "9,1,1", "128", "0", "40", "0"],
        ["bytes", "loss_kernel_7", "7418000000"],
        ["triton", "loss_kernel_7", "49152,1,1", "256", "0", "40", "0"],
        ["bytes", "triton_poi_fused_add_1", "1000"],
        ["triton", "triton_poi_fused_add_1", "1,1,1", "128", "0", "40", "0"],
        ["torch", "add_kernel", "1,1,1", "128"],
    ]
    found = kernel_costs.estimate(lines * 2, flex_flop=2 * 214.5e9, steps=2)
    assert found["estimate_ms"] == {
        "flex attention": 1.0,
        "products bf16": 1.51,
        "attention forward": 0.48,
        "other generated": 0.76,
        "loss": 4.19,
        "torch's kernels": 0.0,
    }
    assert found["estimate_sum_ms"] == 7.9
