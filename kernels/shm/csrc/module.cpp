// The Python face of the exchanges. No protocol is in here, and no Python in the others.
//
// Every call that waits or copies rows runs without the GIL. Arrays and mappings that a call may touch are held
// for as long as the exchange lives.

#include <map>
#include <memory>
#include <optional>
#include <string>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "fence.hpp"
#include "floor.hpp"
#include "sentinel.hpp"
#include "two_sided.hpp"

namespace py = pybind11;

namespace epcross {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;
using Numbers = std::map<std::string, std::size_t>;

std::size_t number(const Numbers& numbers, const char* name) {
    const auto found = numbers.find(name);
    if (found == numbers.end()) throw std::invalid_argument(std::string("missing number: ") + name);
    return found->second;
}

Shape shape_from(const Numbers& numbers) {
    const auto get = [&](const char* name) { return static_cast<std::uint32_t>(number(numbers, name)); };
    return {get("rank"), get("ep_size"), get("capacity"), get("top_k"), get("hidden")};
}

Layout layout_from(const Numbers& numbers) {
    Layout layout;
    for (auto [name, to] : std::initializer_list<std::pair<const char*, std::size_t*>>{
             {"scale_at", &layout.scale_at},
             {"ids_at", &layout.ids_at},
             {"weights_at", &layout.weights_at},
             {"header_at", &layout.header_at},
             {"record_bytes", &layout.record_bytes},
             {"escape_bytes", &layout.escape_bytes},
             {"partial_bytes", &layout.partial_bytes},
             {"control", &layout.control}}) {
        *to = number(numbers, name);
    }
    const auto region = [&](const char* name, std::size_t& to) {  // a protocol names the regions that it has
        if (const auto found = numbers.find(name); found != numbers.end()) to = found->second;
    };
    region("count_flags", layout.count_flags);
    region("dispatch_flags", layout.dispatch_flags);
    region("combine_flags", layout.combine_flags);
    region("records", layout.records[0]);
    region("partials", layout.partials[0]);
    for (const int set : {0, 1}) {
        const auto of_set = [&](const char* stem, std::size_t& to) { region((stem + std::to_string(set)).c_str(), to); };
        of_set("counts_", layout.counts[set]);
        of_set("records_", layout.records[set]);
        of_set("escapes_", layout.escapes[set]);
        of_set("partials_", layout.partials[set]);
    }
    return layout;
}

/// The inputs and outputs of one set: arrays of the caller, read and written in place.
struct Set {
    Array<std::int32_t> ids;
    Array<float> weights;
    Array<std::uint8_t> rows, scales;
    Array<std::uint16_t> out;
    std::optional<Array<std::uint16_t>> staged;
    Batch batch;
    std::uint16_t* out_at = nullptr;
};

/// An exchange, its mappings and its sets.
template <typename Protocol>
class Bound {
  public:
    Bound(const Numbers& shape, const Numbers& layout, const std::vector<py::buffer>& workspaces,
          std::vector<std::int32_t> slot_rank, double wait_limit_s, bool share_cores, std::size_t sets)
        : shape_(shape_from(shape)), layout_(layout_from(layout)), slots_(slot_rank.size()), sets_(sets) {
        if (workspaces.size() != shape_.ep_size) throw std::invalid_argument("one workspace for each rank");
        for (const auto rank : slot_rank) {
            if (rank < 0 || static_cast<std::uint32_t>(rank) >= shape_.ep_size) {
                throw std::invalid_argument("slot_rank names rank " + std::to_string(rank));
            }
        }
        Workspaces mapped{shape_, layout_, {}};
        for (const auto& workspace : workspaces) {
            mappings_.push_back(workspace.request(true));
            if (static_cast<std::size_t>(mappings_.back().size) < number(layout, "total_bytes")) {
                throw std::invalid_argument("a workspace is smaller than its layout");
            }
            mapped.base.push_back(static_cast<Byte*>(mappings_.back().ptr));
        }
        Patience patience{.limit_s = wait_limit_s};
        if (share_cores) patience.spins_before_yield = 16;
        exchange_ = std::make_unique<Protocol>(std::move(mapped), std::move(slot_rank), patience);
    }

    void start(std::uint32_t first_epoch) {
        py::gil_scoped_release release;
        exchange_->start(first_epoch);
    }

    void bind(std::size_t set, Array<std::int32_t> ids, Array<float> weights, Array<std::uint8_t> rows,
              Array<std::uint8_t> scales, Array<std::uint16_t> out) {
        const auto tokens = ids.ndim() == 2 ? ids.shape(0) : -1;
        const auto is = [&](const py::array& array, std::size_t columns) {
            return array.ndim() == 2 && array.shape(0) == tokens && array.shape(1) == static_cast<py::ssize_t>(columns);
        };
        if (!is(ids, shape_.top_k) || !is(weights, shape_.top_k) || !is(rows, layout_.row_bytes()) ||
            !is(scales, layout_.scale_bytes()) || !is(out, shape_.hidden)) {
            throw std::invalid_argument("arrays of a set do not fit the shape of the exchange");
        }
        if (tokens > static_cast<py::ssize_t>(shape_.capacity)) {
            throw std::invalid_argument(std::to_string(tokens) + " tokens exceed the capacity of " +
                                        std::to_string(shape_.capacity));
        }
        Set& to = sets_.at(set);
        to.batch = {static_cast<std::uint32_t>(tokens), ids.data(), weights.data(),
                    reinterpret_cast<const Byte*>(rows.data()), reinterpret_cast<const Byte*>(scales.data())};
        to.out_at = out.mutable_data();
        to.ids = std::move(ids), to.weights = std::move(weights), to.rows = std::move(rows);
        to.scales = std::move(scales), to.out = std::move(out);
        to.staged.reset();
        check(set);
    }

    /// Refuse ids that name no slot; called for each change of a set, so that no exchange has to.
    void check(std::size_t set) {
        const Batch& batch = sets_.at(set).batch;
        const std::size_t count = std::size_t{batch.tokens} * shape_.top_k;
        for (std::size_t i = 0; i < count; ++i) {
            if (batch.ids[i] < -1 || batch.ids[i] >= static_cast<std::int64_t>(slots_)) {
                throw std::invalid_argument("token " + std::to_string(i / shape_.top_k) + " names slot " +
                                            std::to_string(batch.ids[i]) + "; allowed are 0 to " +
                                            std::to_string(static_cast<std::int64_t>(slots_) - 1) + ", and -1");
            }
        }
    }

    void dispatch(std::size_t set) {
        const Batch& batch = sets_.at(set).batch;
        guarded([&] { exchange_->dispatch(batch); });
    }

    py::tuple received() const {
        const auto rows = static_cast<py::ssize_t>(exchange_->rows());
        const auto top_k = static_cast<py::ssize_t>(shape_.top_k);
        Array<std::int32_t> source(rows), token(rows), ids({rows, top_k});
        Array<float> weights({rows, top_k});
        Array<std::uint8_t> data({rows, static_cast<py::ssize_t>(layout_.row_bytes())});
        Array<std::uint8_t> scales({rows, static_cast<py::ssize_t>(layout_.scale_bytes())});
        exchange_->copy_received({source.mutable_data(), token.mutable_data(), ids.mutable_data(),
                                  weights.mutable_data(), reinterpret_cast<Byte*>(data.mutable_data()),
                                  reinterpret_cast<Byte*>(scales.mutable_data())});
        return py::make_tuple(source, token, ids, weights, data, scales);
    }

    /// Keep `staged` [rows, partial_bytes / 2] for the experts of this set, and write it where combine reads.
    void stage(std::size_t set, Array<std::uint16_t> staged) {
        if (staged.ndim() != 2 || staged.shape(0) != static_cast<py::ssize_t>(exchange_->rows()) ||
            staged.shape(1) != static_cast<py::ssize_t>(layout_.partial_bytes / sizeof(std::uint16_t))) {
            throw std::invalid_argument("partials do not fit the rows received");
        }
        sets_.at(set).staged = std::move(staged);
        experts(set);
    }

    void experts(std::size_t set) {
        const auto& staged = sets_.at(set).staged;
        if (!staged || staged->shape(0) != static_cast<py::ssize_t>(exchange_->rows())) {
            throw std::invalid_argument("stage the partials of this set before its experts run");
        }
        const auto* from = reinterpret_cast<const Byte*>(staged->data());
        guarded([&] { exchange_->experts(from); });
    }

    void combine(std::size_t set) {
        auto* out = sets_.at(set).out_at;
        guarded([&] { exchange_->combine(out); });
    }

    std::uint32_t epoch() const { return exchange_->epoch(); }

  private:
    /// Run without the GIL. After an expired wait the round is broken: every later call says so at once.
    template <typename Body>
    void guarded(Body&& body) {
        py::gil_scoped_release release;
        if (!expired_.empty()) throw Expired(expired_);
        try {
            body();
        } catch (const Expired& expired) {
            expired_ = expired.what();
            throw;
        }
    }

    Shape shape_;
    Layout layout_;
    std::size_t slots_;
    std::vector<py::buffer_info> mappings_;  // a mapping cannot be closed while it is held here
    std::vector<Set> sets_;
    std::unique_ptr<Protocol> exchange_;
    std::string expired_;
};

template <typename Protocol>
void declare(py::module_& module, const char* name) {
    using B = Bound<Protocol>;
    py::class_<B>(module, name)
        .def(py::init<const Numbers&, const Numbers&, const std::vector<py::buffer>&, std::vector<std::int32_t>, double,
                      bool, std::size_t>(),
             py::arg("shape"), py::arg("layout"), py::arg("workspaces"), py::arg("slot_rank"), py::kw_only(),
             py::arg("wait_limit_s"), py::arg("share_cores"), py::arg("sets"))
        .def("start", &B::start, py::arg("first_epoch"))
        .def("bind", &B::bind, py::arg("set_index"), py::arg("ids").noconvert(), py::arg("weights").noconvert(),
             py::arg("rows").noconvert(), py::arg("scales").noconvert(), py::arg("out").noconvert())
        .def("check", &B::check)
        .def("dispatch", &B::dispatch)
        .def("received", &B::received)
        .def("stage", &B::stage, py::arg("set_index"), py::arg("staged").noconvert())
        .def("experts", &B::experts)
        .def("combine", &B::combine)
        .def_property_readonly("epoch", &B::epoch);
}

/// The word at the start of a buffer.
Word* word_of(const py::buffer_info& buffer) {
    if (buffer.size * buffer.itemsize < static_cast<py::ssize_t>(sizeof(Word))) {
        throw std::invalid_argument("a flag takes 8 bytes");
    }
    return static_cast<Word*>(buffer.ptr);
}

}  // namespace
}  // namespace epcross

PYBIND11_MODULE(_epcross_shm, module) {
    using namespace epcross;
    py::register_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const Expired& expired) {
            py::set_error(py::module_::import("epcross.kernels.errors").attr("WaitExpired"), expired.what());
        }
    });
    module.attr("ARMED") = py::int_(kArmed);
    declare<Fence>(module, "Fence");
    declare<Sentinel>(module, "Sentinel");
    declare<TwoSided>(module, "TwoSided");

    module.def("empty", [] { py::gil_scoped_release release; }, "What a call costs that does nothing.");
    module.def(
        "ping_pong",
        [](const py::buffer& mine, const py::buffer& theirs, bool first, std::uint32_t rounds, std::uint32_t rank,
           std::uint32_t peer, double wait_limit_s, bool share_cores) {
            const auto mine_info = mine.request(true), theirs_info = theirs.request(true);
            Word* const own = word_of(mine_info);
            const Word* const other = word_of(theirs_info);
            Patience patience{.limit_s = wait_limit_s};
            if (share_cores) patience.spins_before_yield = 16;
            py::gil_scoped_release release;
            return ping_pong(own, other, first, rounds, patience, {rank, peer, "floor", 0});
        },
        py::arg("mine"), py::arg("theirs"), py::kw_only(), py::arg("first"), py::arg("rounds"), py::arg("rank"),
        py::arg("peer"), py::arg("wait_limit_s"), py::arg("share_cores"));
    module.def(
        "timed_copy",
        [](const py::buffer& dst, const py::buffer& src) {
            const auto to = dst.request(true), from = src.request();
            const auto bytes = static_cast<std::size_t>(to.size * to.itemsize);
            if (bytes != static_cast<std::size_t>(from.size * from.itemsize) || bytes % 64 != 0) {
                throw std::invalid_argument("both buffers need the same size, a multiple of 64 bytes");
            }
            py::gil_scoped_release release;
            return timed_copy(static_cast<Byte*>(to.ptr), static_cast<const Byte*>(from.ptr), bytes);
        },
        py::arg("dst"), py::arg("src"));
}
