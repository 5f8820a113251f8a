//! Compares the layouts of `abi` with the installed header, if there is one.

use std::mem::{offset_of, size_of};
use std::process::Command;

use super::super::abi::*;

/// Offset of each used field, with its C expression.
fn layouts() -> Vec<(&'static str, usize)> {
    macro_rules! offsets {
        ($($rust:ident $c:literal { $($field:ident),* }),* $(,)?) => {
            vec![$($((
                concat!("offsetof(struct ", $c, ", ", stringify!($field), ")"),
                offset_of!($rust, $field),
            ),)*)*]
        };
    }
    let mut all = offsets! {
        IbvContext "ibv_context" { device, ops },
        ContextOps "ibv_context_ops" { poll_cq, post_send, post_recv },
        IbvPd "ibv_pd" { context, handle },
        IbvMr "ibv_mr" { context, pd, addr, length, handle, lkey, rkey },
        IbvCq "ibv_cq" { context, channel, cq_context, handle, cqe },
        IbvQp "ibv_qp" {
            context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type
        },
        QpCap "ibv_qp_cap" {
            max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data
        },
        QpInitAttr "ibv_qp_init_attr" {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all
        },
        GlobalRoute "ibv_global_route" {
            dgid, flow_label, sgid_index, hop_limit, traffic_class
        },
        AhAttr "ibv_ah_attr" {
            grh, dlid, sl, src_path_bits, static_rate, is_global, port_num
        },
        QpAttr "ibv_qp_attr" {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index,
            en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer,
            port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit
        },
        PortAttr "ibv_port_attr" {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr,
            qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout,
            init_type_reply, active_width, active_speed, phys_state, link_layer, flags,
            port_cap_flags2
        },
        Sge "ibv_sge" { addr, length, lkey },
        SendWr "ibv_send_wr" { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data },
        RecvWr "ibv_recv_wr" { wr_id, next, sg_list, num_sge },
        Wc "ibv_wc" {
            wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags,
            pkey_index, slid, sl, dlid_path_bits
        },
    };
    all.extend([
        ("sizeof(struct ibv_context_ops)", size_of::<ContextOps>()),
        ("sizeof(struct ibv_qp_init_attr)", size_of::<QpInitAttr>()),
        ("sizeof(struct ibv_qp_attr)", size_of::<QpAttr>()),
        ("sizeof(struct ibv_port_attr)", size_of::<PortAttr>()),
        ("sizeof(struct ibv_sge)", size_of::<Sge>()),
        ("sizeof(struct ibv_send_wr)", size_of::<SendWr>()),
        ("sizeof(struct ibv_recv_wr)", size_of::<RecvWr>()),
        ("sizeof(struct ibv_wc)", size_of::<Wc>()),
        ("sizeof(union ibv_gid)", size_of::<Gid>()),
    ]);
    all
}

/// Values of enumerators, with their C names.
fn values() -> Vec<(&'static str, i64)> {
    vec![
        ("IBV_QPS_INIT", QPS_INIT.into()),
        ("IBV_QPS_RTR", QPS_RTR.into()),
        ("IBV_QPS_RTS", QPS_RTS.into()),
        ("IBV_QPS_ERR", QPS_ERR.into()),
        ("IBV_QPT_UC", QPT_UC.into()),
        ("IBV_MTU_1024", MTU_1024.into()),
        ("IBV_PORT_ACTIVE", PORT_ACTIVE.into()),
        ("IBV_LINK_LAYER_ETHERNET", LINK_LAYER_ETHERNET.into()),
        ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE.into()),
        ("IBV_ACCESS_REMOTE_WRITE", ACCESS_REMOTE_WRITE.into()),
        ("IBV_ACCESS_REMOTE_READ", ACCESS_REMOTE_READ.into()),
        ("IBV_QP_STATE", QP_STATE.into()),
        ("IBV_QP_ACCESS_FLAGS", QP_ACCESS_FLAGS.into()),
        ("IBV_QP_PKEY_INDEX", QP_PKEY_INDEX.into()),
        ("IBV_QP_PORT", QP_PORT.into()),
        ("IBV_QP_AV", QP_AV.into()),
        ("IBV_QP_PATH_MTU", QP_PATH_MTU.into()),
        ("IBV_QP_RQ_PSN", QP_RQ_PSN.into()),
        ("IBV_QP_SQ_PSN", QP_SQ_PSN.into()),
        ("IBV_QP_DEST_QPN", QP_DEST_QPN.into()),
        ("IBV_WR_SEND", WR_SEND.into()),
        ("IBV_SEND_SIGNALED", SEND_SIGNALED.into()),
        ("IBV_WC_SEND", WC_SEND.into()),
        ("IBV_WC_RECV", WC_RECV.into()),
        ("IBV_WC_SUCCESS", WC_SUCCESS.into()),
        ("IBV_WC_LOC_LEN_ERR", WC_LOC_LEN_ERR.into()),
        ("IBV_WC_LOC_PROT_ERR", WC_LOC_PROT_ERR.into()),
        ("IBV_WC_WR_FLUSH_ERR", WC_WR_FLUSH_ERR.into()),
        ("IBV_WC_GENERAL_ERR", WC_GENERAL_ERR.into()),
    ]
}

#[test]
fn layouts_are_those_of_the_header() {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("probe.c"), folder.path().join("probe"));
    let mut text = "#include <stddef.h>\n#include <stdio.h>\n\
                    #include <infiniband/verbs.h>\nint main(void) {\n"
        .to_string();
    let known: Vec<(String, i64)> = layouts()
        .into_iter()
        .map(|(name, value)| (name.to_string(), i64::try_from(value).unwrap()))
        .chain(
            values()
                .into_iter()
                .map(|(name, value)| (name.to_string(), value)),
        )
        .collect();
    for (name, _) in &known {
        text += &format!("  printf(\"%lld\\n\", (long long)({name}));\n");
    }
    text += "  return 0;\n}\n";
    std::fs::write(&source, text).unwrap();
    let made = Command::new("cc")
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .output();
    if !made.as_ref().is_ok_and(|made| made.status.success()) {
        println!(
            "SKIPPED layouts_are_those_of_the_header: no C compiler, or no infiniband/verbs.h"
        );
        return;
    }
    let output = Command::new(&program).output().unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    let theirs: Vec<i64> = output.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(theirs.len(), known.len());
    for ((name, ours), theirs) in known.iter().zip(theirs) {
        assert_eq!(*ours, theirs, "{name}");
    }
}
