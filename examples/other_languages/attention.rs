// flashsdk in Rust, through its C API: attention of a few rows, held against a plain loop.
//
//     library=$(python -m flashsdk config --library)
//     rustc --edition 2021 attention.rs -C link-arg=$library -C link-arg=-Wl,-rpath,$(dirname $library)
use std::ffi::{c_char, c_void, CStr};
use std::ptr::{addr_of, null, null_mut};

#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype_code: u8,
    dtype_bits: u8,
    dtype_lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

// flashsdk_attention_args. Fields of newer headers, behind the last one, are not given.
#[repr(C)]
struct Args {
    struct_size: usize,
    q: *const Tensor,
    k: *const Tensor,
    v: *const Tensor,
    out: *const Tensor,
    lse: *const Tensor,
    backward: [*const Tensor; 5], // dout, dlse, dq, dk, dv
    softmax_scale: *const f64,
    softcap: f64,
    band: *const c_void,
    block_mask: *const c_void,
    bias: *const Tensor,
    alibi_slopes: *const Tensor,
    dropout_p: f64,
    seed: u64,
    offset: u64,
    seed_tensor: *const Tensor,
    cu_seqlens_q: *const Tensor,
    cu_seqlens_k: *const Tensor,
    max_seqlen_q: i64,
    max_seqlen_k: i64,
    backend: *const c_char,
    deterministic: i32,
    num_splits: i32,
}

enum Plan {}

extern "C" {
    fn flashsdk_plan_forward(args: *const Args, plan: *mut *mut Plan) -> i32;
    fn flashsdk_plan_workspace_size(plan: *const Plan) -> usize;
    fn flashsdk_plan_launch(plan: *const Plan, workspace: *mut c_void, size: usize, stream: *mut c_void) -> i32;
    fn flashsdk_plan_destroy(plan: *mut Plan);
    fn flashsdk_last_error() -> *const c_char;
    fn flashsdk_version() -> *const c_char;
}

fn text(line: *const c_char) -> String {
    unsafe { CStr::from_ptr(line) }.to_string_lossy().into_owned()
}

fn forward(args: &Args) -> Result<(), String> {
    let failed = || Err(text(unsafe { flashsdk_last_error() }));
    let mut plan: *mut Plan = null_mut();
    if unsafe { flashsdk_plan_forward(args, &mut plan) } != 0 {
        return failed();
    }
    let size = unsafe { flashsdk_plan_workspace_size(plan) };
    let mut memory = vec![0u8; size + 256];
    let aligned = memory.as_mut_ptr() as usize + 256 - memory.as_ptr() as usize % 256;
    let status = unsafe { flashsdk_plan_launch(plan, aligned as *mut c_void, size, null_mut()) };
    unsafe { flashsdk_plan_destroy(plan) };
    if status != 0 { failed() } else { Ok(()) }
}

const ROWS: usize = 5;
const DIM: usize = 8;

fn tensor(data: &mut [f32], shape: &[i64]) -> Tensor {
    let (data, shape, ndim) = (data.as_mut_ptr() as *mut c_void, shape.as_ptr(), shape.len() as i32);
    let (cpu, float32) = (1, (2, 32, 1));
    Tensor {
        data, device_type: cpu, device_id: 0, ndim,
        dtype_code: float32.0, dtype_bits: float32.1, dtype_lanes: float32.2,
        shape, strides: null(), byte_offset: 0,
    }
}

fn main() {
    let values = |first: usize| (first..first + ROWS * DIM).map(|n| (n as f32).sin()).collect::<Vec<f32>>();
    let (mut q, mut k, mut v) = (values(0), values(1), values(2));
    let (mut out, mut lse) = (vec![0f32; ROWS * DIM], vec![0f32; ROWS]);
    let (shape, lse_shape) = ([1, ROWS as i64, 1, DIM as i64], [1, 1, ROWS as i64]);
    let tensors = [
        tensor(&mut q, &shape), tensor(&mut k, &shape), tensor(&mut v, &shape),
        tensor(&mut out, &shape), tensor(&mut lse, &lse_shape),
    ];
    // All bits zero: nothing is given.
    let mut args: Args = unsafe { std::mem::zeroed() };
    args.struct_size = std::mem::size_of::<Args>();
    [args.q, args.k, args.v, args.out, args.lse] = [0, 1, 2, 3, 4].map(|n| addr_of!(tensors[n]));
    forward(&args).unwrap();

    for i in 0..ROWS {
        let dot = |j: usize| (0..DIM).map(|c| f64::from(q[i * DIM + c]) * f64::from(k[j * DIM + c])).sum::<f64>();
        let p: Vec<f64> = (0..ROWS).map(|j| (dot(j) / (DIM as f64).sqrt()).exp()).collect();
        for c in 0..DIM {
            let sum: f64 = (0..ROWS).map(|j| p[j] * f64::from(v[j * DIM + c])).sum();
            assert!((f64::from(out[i * DIM + c]) - sum / p.iter().sum::<f64>()).abs() < 1e-6);
        }
    }
    args.q = null();
    assert_eq!(forward(&args), Err("q: not given; a tensor".to_string()));
    println!("flashsdk {}: as the definition", text(unsafe { flashsdk_version() }));
}
